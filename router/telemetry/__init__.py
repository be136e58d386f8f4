"""What is known of requests: record, metrics, log."""

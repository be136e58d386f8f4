"""Who a client is, and what it shares with others."""

"""What a calibration of a pair found, for people."""

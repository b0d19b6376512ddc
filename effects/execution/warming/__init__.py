"""What happens before the first request: dummy steps, captures, measured costs."""

"""The router in front of other servers."""

"""The CPU: paged attention in plain torch, logit changes and sampling in numpy."""

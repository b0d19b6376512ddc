"""The frozen records: configuration, requests, state, events, commands, plans."""

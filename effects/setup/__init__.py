"""From options to a plan of memory: settings, device, fingerprint."""

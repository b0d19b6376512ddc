"""The setup of an engine: settings, device, memory plan, fingerprint."""

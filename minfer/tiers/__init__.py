"""KV blocks in tiers, besides the device's pool: stores, and the ends of transfers."""

"""Who may send what: keys, tenants, hosts, bounds."""

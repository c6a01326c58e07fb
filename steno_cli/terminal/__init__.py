"""What commands share: flags from settings, the connection to a proxy, output."""

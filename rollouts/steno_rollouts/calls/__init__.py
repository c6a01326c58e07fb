"""Calls to the proxy that must not be lost: a post runs to its end, and a proxy that is away is waited for."""

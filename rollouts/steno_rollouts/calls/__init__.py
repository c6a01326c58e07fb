"""How the proxy is asked where the answer matters: what is posted comes to its end, and a proxy that is away is waited for."""

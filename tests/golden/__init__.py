"""What earlier versions wrote, kept byte for byte: every later version must read it."""

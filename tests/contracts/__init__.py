"""What every penalty promises, tested once for all of them."""

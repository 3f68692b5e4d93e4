"""What no chapter teaches: plumbing, and the model itself."""

"""What the protocols say: which fields a request may have, how an answer is worded, which addresses there are.

Without this room the server would generate as well, but no client would understand it.
"""

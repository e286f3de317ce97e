"""Work that has begun and is not over: updates, the fence before their memory, and the calls that wait for them."""

"""Other people's training loops: names that their trainers accept, figures for their loggers, and scripts that know nothing of us.

Nothing here is imported by the rest of the package, and importing it changes nothing: each function that extends another package
says how it is undone.
"""

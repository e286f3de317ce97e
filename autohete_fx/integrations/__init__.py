"""Other people's training loops: names that their trainers accept, figures for their loggers, and scripts that know nothing of us.

The rest of the package imports nothing of this, and importing it changes nothing. Each function that extends another package
says how it is undone.
"""

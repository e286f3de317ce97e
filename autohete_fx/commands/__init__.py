"""The commands of ``autohete``, a module each: what was parsed goes in, what is to be printed comes out."""

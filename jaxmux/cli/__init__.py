"""The command lines, and the display of plans as tables, a picture and a trace."""

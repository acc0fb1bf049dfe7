"""The commands of jaxmux, and the display of plans as tables, a picture and a trace."""

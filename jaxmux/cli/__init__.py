"""The command lines, and how they show plans: tables, a picture, a trace."""

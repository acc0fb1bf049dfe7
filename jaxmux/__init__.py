"""jaxmux: many fine-tuning tasks at once on one frozen backbone."""

"""The bundled demo: a tiny base model and the data of four tasks."""

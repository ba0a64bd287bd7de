"""What runs beside the server: graphs compiled for other machines."""

"""Scripts that measure and draw. They import everything; nothing imports them."""

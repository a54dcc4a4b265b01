"""A transformer whose weights and Adam slots are twice what one worker may use, on four of them."""

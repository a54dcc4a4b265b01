"""``tf-ooo bench prediction``: what plans predict before any step of them has run, beside measured steps."""

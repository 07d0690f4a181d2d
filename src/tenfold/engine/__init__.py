"""The one loop: it drives the scheduler against a runner and tells everyone what came of it. No torch here."""

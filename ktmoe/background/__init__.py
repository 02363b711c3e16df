"""Work on threads of ktmoe's own: jobs in order, and things that are made a few at a time."""

"""Look at what a method makes of tokens: pages, figures, a terminal, a notebook. Reads token dumps (:mod:`grail_advantage.token_dump`)."""

"""One fixed protocol that measures codes and samples, of a network and of anything it is compared with."""

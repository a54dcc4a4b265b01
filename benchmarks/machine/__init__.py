"""One machine plays several: links of chosen bandwidth, shares of the CPU, limits of memory."""

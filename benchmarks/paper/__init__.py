"""The networks of out-of-order backprop (EuroSys 2022, doi 10.1145/3492321.3519563)."""

"""Planning on paper: hardware, footprints, schedule, cost model, LP, search, simulator. No torch."""

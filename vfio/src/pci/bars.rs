//! How a BAR's region is cut into what the guest maps and what the VMM answers.

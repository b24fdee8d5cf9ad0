//! Step 3: how host functions are assigned.

pub(super) mod assigned;
pub(super) mod cliques;

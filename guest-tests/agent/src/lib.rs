//! What the guest agent reports and its readers parse: [`findings`]. The agent itself is the program `egm-guest`.

#![forbid(unsafe_code)]

pub mod findings;

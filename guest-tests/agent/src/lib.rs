//! The report of the guest agent, for its readers: [`findings`]. The agent itself is the program `egm-guest`.
//!
//! ```text
//!  check of a plan ──► Check ───► line on the console ──► egm-lab
//!  validation ───────► Verdict, Figures ──► Run ──┬──► text, JSON, JUnit XML, a page
//!                                                 └──► Comparison with an earlier run
//! ```
//! ```
//! use egm_guest::findings::Figure;
//!
//! let figure = Figure::of("write, node 1", Some(1 << 30), "GB/s", &mut [51.0, 52.0, 50.0]);
//! assert_eq!((figure.value, figure.rounds), (51.0, 3));
//! ```

#![forbid(unsafe_code)]

pub mod findings;

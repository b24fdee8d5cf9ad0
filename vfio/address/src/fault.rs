//! Planted faults: each is a defect that one named test or scenario must find.
//!
//! Only unit tests and programs built with the feature `planted-faults` have them, and the variable `EGM_FAULT` chooses one.
//! `guest-tests/faults.json` names the check that each must turn red, and `scripts/test --faults` runs them all.

use std::fs::File;
use std::io::Write as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

#[cfg(all(feature = "planted-faults", not(debug_assertions)))]
compile_error!("planted-faults is for tests: no build without debug assertions may have it");

/// Whether the fault `name` is the one of this process. The first call that finds it reports that in the file that
/// `EGM_FAULT_REACHED` names, or on standard error without one: what a program prints may be the result of a test.
///
/// It reads the environment and writes, so no handler of a signal may call it.
#[doc(hidden)]
pub fn planted(name: &str) -> bool {
    static CHOSEN: OnceLock<Option<String>> = OnceLock::new();
    static REACHED: AtomicBool = AtomicBool::new(false);
    let chosen = CHOSEN.get_or_init(|| std::env::var("EGM_FAULT").ok());
    let is_chosen = chosen.as_deref() == Some(name);
    if is_chosen && !REACHED.swap(true, Ordering::Relaxed) {
        let line = format!("fault {name} reached\n");
        let file = std::env::var_os("EGM_FAULT_REACHED").map(|path| File::options().append(true).open(path));
        // One write to the descriptor itself: a test harness captures what `eprintln` prints, and threads share it.
        let _ = match file {
            Some(Ok(mut file)) => file.write_all(line.as_bytes()),
            _ => std::io::stderr().write_all(line.as_bytes()),
        };
    }
    is_chosen
}

/// Whether the planted fault with this name is on: `false`, and no code, in programs that users get.
#[macro_export]
macro_rules! fault {
    ($name:literal) => {
        cfg!(any(test, feature = "planted-faults")) && $crate::fault::planted($name)
    };
}

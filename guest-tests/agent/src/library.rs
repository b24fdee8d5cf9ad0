//! The unsafe module: loading a vendor's library.
//!
//! Callers rely on this: what [`open`] returns was found by the system's loader under one of the names given, and a
//! program that is linked statically never tries.
#![expect(unsafe_code, reason = "a library's initialisers run when it is loaded")]

use libloading::Library;

use crate::finding::Finding;

/// Reason why this program can load no library at all, if so: it is linked statically, and then another libc would be
/// loaded with each library.
pub(crate) fn unloadable(name: &str) -> Option<Finding> {
    cfg!(target_feature = "crt-static").then(|| {
        Finding::skipped(format!(
            "this egm-guest is linked statically and cannot load {name}: build one with `cargo guest`"
        ))
    })
}

/// Loads the first of `names` that the system's loader finds; otherwise the skipped finding names what is missing.
pub(crate) fn open(names: &[&str]) -> Result<Library, Finding> {
    if let Some(finding) = unloadable(names.first().copied().unwrap_or("libraries")) {
        return Err(finding);
    }
    let mut last = String::new();
    for name in names {
        // SAFETY: the initialisers of a library that the system's administrator installed are trusted as this program is.
        match unsafe { Library::new(*name) } {
            Ok(library) => return Ok(library),
            // The loader's own words are the source of libloading's.
            Err(error) => {
                last =
                    std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string)
            }
        }
    }
    Err(Finding::skipped(format!("no {} on this machine: {last}", names.join(" or "))))
}

#[cfg(test)]
mod tests {
    use egm_guest::findings::Outcome;

    use super::*;

    #[test]
    fn a_library_that_is_not_there_skips_and_states_its_name() {
        let finding = open(&["libegm-no-such.so.1", "libegm-no-such.so.0"]).unwrap_err();
        assert_eq!(finding.outcome, Outcome::Skipped);
        assert!(finding.reason.contains("libegm-no-such.so.1"), "{}", finding.reason);
        assert_eq!(finding.reason.contains("cargo guest"), unloadable("x").is_some());
    }
}

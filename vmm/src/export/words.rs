//! Values of a configuration, as words of a command line or of XML.

use std::path::Path;

use egm_config::Clique;

/// A path that [`load`](super::load()) has looked at.
pub(super) fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

/// Numbers of descriptors with `separator` between them.
pub(super) fn descriptors(numbers: &[i32], separator: &str) -> String {
    let numbers: Vec<String> = numbers.iter().map(i32::to_string).collect();
    numbers.join(separator)
}

/// The clique number for a GPU's driver; other monitors choose none by themselves.
pub(super) const fn clique(clique: Clique) -> Option<u8> {
    match clique {
        Clique::Number(number) => Some(number),
        Clique::Auto | Clique::Off => None,
    }
}

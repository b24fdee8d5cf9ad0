//! Values of a configuration, as words of a command line or of XML.

use std::path::Path;

use egm_config::Clique;

/// A path that [`load`](super::load()) has looked at.
pub(super) fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

/// A MAC address in lower case: `52:54:00:12:34:56`.
pub(super) fn mac(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
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

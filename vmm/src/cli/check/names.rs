//! Short names of host functions.

use egm_vfio::host::HostFunction;

/// Kind of a function, as its name begins, by its 24-bit class code.
const fn kind(class: u32) -> &'static str {
    match class >> 8 {
        0x0108 => "NVME",
        other => match other >> 8 {
            0x02 => "NIC",
            0x03 => "GPU",
            _ => "FN",
        },
    }
}

/// A name for each of `functions`: its kind, and its position among those of its kind.
pub(super) fn names(functions: &[&HostFunction]) -> Vec<String> {
    let mut names: Vec<String> = Vec::with_capacity(functions.len());
    for (index, function) in functions.iter().enumerate() {
        let kind_of_this = kind(function.class);
        let before = functions.iter().take(index).filter(|other| kind(other.class) == kind_of_this);
        names.push(format!("{kind_of_this}{}", before.count()));
    }
    names
}

/// The kind in a name that [`names`] gives.
pub(super) fn kind_in(name: &str) -> &str {
    name.trim_end_matches(|c: char| c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_counted_by_kind_in_their_order() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/facts/hgx-h200.json");
        let facts = crate::facts::load(file.as_ref()).unwrap();
        let nth = |class: u32| facts.functions.iter().filter(move |function| function.class >> 16 == class);
        let (gpus, nics) = (nth(0x03).collect::<Vec<_>>(), nth(0x02).collect::<Vec<_>>());
        let bridge = facts.functions.iter().find(|function| function.class >> 16 == 0x06).unwrap();
        assert_eq!(
            names(&[gpus[0], nics[0], gpus[1], bridge, nics[1]]),
            ["GPU0", "NIC0", "GPU1", "FN0", "NIC1"]
        );
        assert_eq!([kind(0x01_0802), kind_in("NVME12"), kind_in("GPU0")], ["NVME", "NVME", "GPU"]);
    }
}

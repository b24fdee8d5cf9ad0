//! Names of the files of slices in the folder of a region.

use std::ffi::OsStr;

use egm_address::{InRegion, Offset, Span};

/// The file of a slice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SliceFile {
    /// First byte and bytes in the region, in hexadecimal.
    pub(crate) name: String,
    /// The bytes of the region that it holds.
    pub(crate) span: Span<InRegion>,
}

impl SliceFile {
    /// The file of `span`.
    pub(crate) fn of(span: Span<InRegion>) -> Self {
        Self { name: format!("{:016x}-{:016x}", span.start().get(), span.size()), span }
    }

    /// The file called `name`; `None` for what no ledger made.
    pub(crate) fn parse(name: &OsStr) -> Option<Self> {
        let (start, size) = name.to_str()?.split_once('-')?;
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        let file = Self::of(Span::new(Offset::new(number(start)?), number(size)?).ok()?);
        (name == OsStr::new(&file.name)).then_some(file)
    }
}

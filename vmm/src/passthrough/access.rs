//! How an access of a guest reaches a device.

use std::ops::Range;

/// An access as its naturally aligned pieces of 1, 2, 4 or 8 bytes: what devices define.
pub(super) fn natural(offset: u64, length: usize) -> impl Iterator<Item = (u64, Range<usize>)> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let left = length.checked_sub(from).filter(|left| *left > 0)?;
        let at = offset.checked_add(u64::try_from(from).ok()?)?;
        let fits = |size: &usize| *size <= left && u64::try_from(*size).is_ok_and(|n| at.is_multiple_of(n));
        let to = from.checked_add([8, 4, 2, 1].into_iter().find(fits)?)?;
        Some((at, std::mem::replace(&mut from, to)..to))
    })
}

//! Reads untrusted input with a limit on its length.

use std::io::{self, Read};

use egm_report::show::size;

/// All bytes of `source`, `most` at most.
///
/// # Errors
/// The kernel's, or `InvalidData` for more.
pub(crate) fn read(source: impl Read, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).is_ok_and(|length| length > most) {
        let what = format!("it is larger than {}", size(most));
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_bytes_are_read_and_one_more_is_too_many() {
        assert_eq!(read(&[7; 1024][..], 1024).unwrap(), [7; 1024]);
        assert_eq!(read(&[7; 1025][..], 1024).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let endless = read(io::repeat(0), 1 << 20).unwrap_err();
        assert_eq!(endless.to_string(), "it is larger than 1 MiB");
    }
}

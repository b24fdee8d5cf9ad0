//! A guest's console, read with bounds: the guest may write anything, for ever.

use std::fs::File;
use std::io::Write;

/// Maximum bytes of a line for the callback; the rest of a longer line is only logged.
const MAX_LINE: usize = egm_guest::findings::MAX_LINE + 256;
/// Bytes of console output that are kept in the log.
const MAX_LOG: usize = 16 << 20;

/// Splits console output into lines and keeps a log.
#[derive(Debug)]
pub(crate) struct Console<W = File> {
    log: W,
    room: usize,
    line: Vec<u8>,
}

impl<W: Write> Console<W> {
    /// A console that is logged to `log`.
    pub(crate) const fn new(log: W) -> Self {
        Self { log, room: MAX_LOG, line: Vec::new() }
    }

    /// Takes output of the guest and passes each complete line to the callback.
    pub(crate) fn feed(&mut self, bytes: &[u8], mut line: impl FnMut(&str)) {
        let kept = bytes.len().min(self.room);
        self.room -= kept;
        // A full disk must not end the run: the result depends on the lines, not on the log.
        let _ = self.log.write_all(bytes.get(..kept).unwrap_or_default());
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let free = MAX_LINE - self.line.len();
            self.line.extend_from_slice(piece.get(..free).unwrap_or(piece));
            if piece.ends_with(b"\n") {
                self.flush(&mut line);
            }
        }
    }

    /// Passes an unfinished last line to the callback.
    pub(crate) fn flush(&mut self, line: &mut impl FnMut(&str)) {
        if !self.line.is_empty() {
            line(String::from_utf8_lossy(&self.line).trim_end());
            self.line.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lines(pieces: &[&[u8]]) -> Vec<String> {
        let mut console = Console::new(Vec::new());
        let mut seen = Vec::new();
        let mut take = |line: &str| seen.push(line.to_owned());
        for piece in pieces {
            console.feed(piece, &mut take);
        }
        console.flush(&mut take);
        seen
    }

    #[test]
    fn a_line_is_whole_however_it_arrives() {
        assert_eq!(lines(&[b"on", b"e\r\ntw", b"o\nthree"]), ["one", "two", "three"]);
    }

    #[test]
    fn a_line_without_end_is_cut_and_the_next_one_is_read() {
        let endless = vec![b'x'; 3 * MAX_LINE];
        let seen = lines(&[&endless, &endless, b"\nnext\n"]);
        assert_eq!((seen[0].len(), seen[1].as_str()), (MAX_LINE, "next"));
    }

    #[test]
    fn the_log_has_an_end() {
        let mut console = Console { log: Vec::new(), room: 10, line: Vec::new() };
        console.feed(&[b'x'; 30], |_| ());
        assert_eq!(console.log.len(), 10);
    }

    proptest! {
        #[test]
        fn any_bytes_are_bounded_lines(pieces in prop::collection::vec(any::<Vec<u8>>(), 0..20)) {
            let pieces: Vec<_> = pieces.iter().map(Vec::as_slice).collect();
            prop_assert!(lines(&pieces).iter().all(|line| !line.contains('\n')));
        }
    }
}

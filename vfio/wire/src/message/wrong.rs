//! Errors in the body of a message.

/// Most bytes of the text with the capabilities, its NUL included. Its depth is bounded by that too: `serde_json` skips
/// what has no name here without recursion.
pub(crate) const MOST_VERSION_DATA: u32 = 4096;

/// Error in the body of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum Wrong {
    /// It ends too early.
    #[error("{what} of {have:#x} bytes needs {need:#x}")]
    Short {
        what: &'static str,
        have: usize,
        /// Bytes needed at least.
        need: usize,
    },
    /// A number in it breaks a rule.
    #[error("{what} is {value:#x}: {rule}")]
    Value {
        what: &'static str,
        /// As the peer wrote it.
        value: u64,
        rule: &'static str,
    },
    /// Invalid text of the version.
    #[error(
        "version data is not a JSON object of capabilities that ends with one NUL, {MOST_VERSION_DATA:#x} bytes at most"
    )]
    Version,
    /// A command that has no number here, or not in this direction.
    #[error("command {command:#x} is not one that this side answers")]
    Command {
        /// As the peer wrote it.
        command: u16,
    },
    /// Descriptors that do not belong to the message.
    #[error("{fds} file descriptors came with command {command:#x}: not as many as it has use for")]
    Descriptors { command: u16, fds: usize },
}

//! One judged item of a machine or a host, with its remedy.

use std::process::ExitCode;

use egm_address::PciAddress;
use serde::Serialize;

use super::inspect::Finding;
use crate::error::{Blame, Report};

/// State of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum RowState {
    /// The machine can use it as intended.
    Ok,
    /// The machine starts, perhaps not as intended.
    Note,
    /// The machine cannot start.
    Cannot,
    /// Only the host itself could show it.
    NotJudged,
}

impl RowState {
    pub(super) const ALL: [Self; 4] = [Self::Ok, Self::Note, Self::Cannot, Self::NotJudged];

    /// The word for a reader.
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Cannot => "cannot",
            Self::NotJudged => "not judged",
        }
    }

    /// `count` items with this state, for the verdict.
    pub(super) fn counted(self, count: usize) -> String {
        match (self, count) {
            (Self::Note, 1) => "1 note".to_owned(),
            (Self::Note, _) => format!("{count} notes"),
            (Self::Cannot, 1) => "1 error".to_owned(),
            (Self::Cannot, _) => format!("{count} errors"),
            (Self::Ok | Self::NotJudged, _) => format!("{count} {}", self.word()),
        }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Row {
    /// `kernel`, `disk "data"`, `GPU0`.
    pub(super) subject: String,
    /// The host function, if it is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) function: Option<PciAddress>,
    pub(super) state: RowState,
    /// What was found, or the error with its sources.
    pub(super) found: String,
    pub(super) help: Option<String>,
    /// The party that must act, where the machine cannot start.
    #[serde(skip)]
    blame: Option<Blame>,
}

impl Row {
    fn new(subject: impl Into<String>, state: RowState, found: impl Into<String>) -> Self {
        let (subject, found) = (subject.into(), found.into());
        Self { subject, function: None, state, found, help: None, blame: None }
    }

    pub(super) fn ok(subject: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(subject, RowState::Ok, found)
    }

    pub(super) fn note(subject: impl Into<String>, found: impl Into<String>, help: Option<String>) -> Self {
        Self { help, ..Self::new(subject, RowState::Note, found) }
    }

    pub(super) fn not_judged(subject: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::new(subject, RowState::NotJudged, reason)
    }

    /// An item that the host lacks.
    pub(super) fn lacking(
        subject: impl Into<String>,
        found: impl Into<String>,
        help: Option<String>,
    ) -> Self {
        Self { help, blame: Some(Blame::Host), ..Self::new(subject, RowState::Cannot, found) }
    }

    /// An item that fails with `error`.
    pub(super) fn failed(subject: impl Into<String>, error: &dyn Report) -> Self {
        let mut found = error.to_string();
        let mut source = error.source();
        while let Some(error) = source {
            found = format!("{found}: {error}");
            source = error.source();
        }
        Self { help: error.help(), blame: Some(error.blame()), ..Self::new(subject, RowState::Cannot, found) }
    }

    pub(super) fn inspected(subject: impl Into<String>, result: Result<Finding, Box<dyn Report>>) -> Self {
        match result {
            Ok(Finding::Ready(found)) => Self::ok(subject, found),
            Ok(Finding::Remark { found, help }) => Self::note(subject, found, help),
            Err(error) => Self::failed(subject, error.as_ref()),
        }
    }

    /// The same item, of the host function at `address`.
    pub(super) fn of_function(self, address: PciAddress) -> Self {
        Self { function: Some(address), ..self }
    }
}

/// The exit code for `rows`: a wrong configuration comes before a host that lacks something, because it has to be changed
/// on any host.
pub(super) fn exit_code(rows: &[Row]) -> ExitCode {
    let blamed = [Blame::Internal, Blame::Configuration, Blame::Host];
    let found = blamed.into_iter().find(|blame| rows.iter().any(|row| row.blame == Some(*blame)));
    found.map_or(ExitCode::SUCCESS, ExitCode::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::boot::BootError;
    use crate::machine::BuildError;

    #[test]
    fn an_error_is_a_row_with_its_sources_its_remedy_and_its_exit_code() {
        let error = BuildError::Boot { file: "/initrd".into(), source: BootError::EmptyInitramfs };
        let row = Row::failed("initramfs", &error);
        assert_eq!(row.found, "cannot boot /initrd: the initramfs is empty");
        assert!(row.help.as_ref().is_some_and(|help| help.contains("cpio")));
        let code = |rows: &[Row]| format!("{:?}", exit_code(rows));
        let is = |code: u8| format!("{:?}", ExitCode::from(code));
        assert_eq!(code(&[]), is(0));
        assert_eq!(code(&[Row::note("a", "b", None), Row::not_judged("c", "d")]), is(0));
        assert_eq!(code(&[Row::lacking("a", "b", None), Row::ok("c", "d")]), is(3));
        assert_eq!(code(&[Row::lacking("a", "b", None), row]), is(2));
    }

    #[test]
    fn counts_have_words_in_singular_and_plural() {
        let counted = |count| RowState::ALL.map(|state| state.counted(count));
        assert_eq!(counted(1), ["1 ok", "1 note", "1 error", "1 not judged"]);
        assert_eq!(counted(2), ["2 ok", "2 notes", "2 errors", "2 not judged"]);
    }

    #[test]
    fn json_has_the_state_in_one_word() {
        let json = serde_json::to_value(Row::not_judged("kernel", "recorded host")).unwrap();
        let expected = serde_json::json!({
            "subject": "kernel", "state": "not-judged", "found": "recorded host", "help": null
        });
        assert_eq!(json, expected);
    }
}

//! Rounds of a measurement in turn with another program's, so that a busy machine affects both alike.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;

use super::each::of_gpu_called;
use super::gpu::Gpu;
use crate::error::Broken;
use crate::validate::Setting;

/// Most bytes of the line that gives a turn.
const MOST: u64 = 64;

/// Source of turns, if `--arg turns=SOCKET` names a Unix socket; without it rounds follow each other at once.
///
/// Before each round a line with the figure's series and bytes, a tab in between, goes to the socket; the round begins
/// when a line comes back. `-` means that no other program was at work meanwhile; other words do not matter. After it
/// comes a line with `took`, a tab and its seconds, which gets no answer.
pub(crate) struct Turns {
    giver: Option<RefCell<BufReader<UnixStream>>>,
    /// Prefix of figures' names in the run's document.
    prefix: String,
}

impl Turns {
    /// Of the giver that `setting` names.
    pub(crate) fn new(setting: &Setting, prefix: String) -> Result<Self, Broken> {
        let connect = |path: &str| {
            UnixStream::connect(path).map_err(Broken::file("connect to the giver of turns at", path))
        };
        let giver = setting.args.text("turns").map(connect).transpose()?;
        Ok(Self { giver: giver.map(|stream| RefCell::new(BufReader::new(stream))), prefix })
    }

    /// Turns for figures of one GPU.
    pub(crate) fn of_gpu(setting: &Setting, gpu: &Gpu) -> Result<Self, Broken> {
        Self::new(setting, of_gpu_called(gpu.device().ordinal))
    }

    /// Waits for a turn for a round of this figure; whether another program was at work meanwhile.
    pub(crate) fn wait(&self, series: &str, bytes: u64) -> Result<bool, Broken> {
        let Some(giver) = &self.giver else { return Ok(false) };
        let mut giver = giver.borrow_mut();
        writeln!(giver.get_mut(), "{}{series}\t{bytes}", self.prefix).map_err(lost())?;
        let mut line = String::new();
        let read = giver.by_ref().take(MOST).read_line(&mut line).map_err(lost())?;
        if read == 0 || !line.ends_with('\n') {
            return Err(lost()(std::io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(line != "-\n")
    }

    /// Reports the seconds that the round took.
    pub(crate) fn took(&self, seconds: f64) -> Result<(), Broken> {
        let Some(giver) = &self.giver else { return Ok(()) };
        writeln!(giver.borrow_mut().get_mut(), "took\t{seconds}").map_err(lost())
    }
}

/// For `map_err` on what fails between here and the giver.
fn lost() -> impl FnOnce(std::io::Error) -> Broken {
    Broken::system("the giver of turns (--arg turns) is lost: start it again")
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;
    use crate::cmdline::Arguments;

    fn setting(args: &[String]) -> Setting {
        Setting { seed: 1, most: 4096, args: Arguments::from_pairs(args).unwrap() }
    }

    /// Has `ask` use turns from a giver that answers with `answers`; returns the lines that this giver received.
    fn given(answers: Vec<&'static str>, ask: impl FnOnce(&Turns)) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("turns");
        let listener = UnixListener::bind(&path).unwrap();
        let giver = thread::spawn(move || {
            let mut stream = BufReader::new(listener.accept().unwrap().0);
            let mut received = Vec::new();
            for answer in answers {
                let mut line = String::new();
                stream.read_line(&mut line).unwrap();
                received.push(line);
                stream.get_mut().write_all(answer.as_bytes()).unwrap();
            }
            received
        });
        ask(&Turns::new(&setting(&[format!("turns={}", path.display())]), "GPU 0, ".into()).unwrap());
        giver.join().unwrap()
    }

    #[test]
    fn without_a_giver_there_is_no_wait() {
        assert!(!Turns::new(&setting(&[]), String::new()).unwrap().wait("read", 4096).unwrap());
    }

    #[test]
    fn each_round_is_asked_for_by_the_figures_name() {
        let received = given(vec!["\n", "-\n"], |turns| {
            assert!(turns.wait("read", 4096).unwrap() && !turns.wait("write", 8192).unwrap());
        });
        assert_eq!(received, ["GPU 0, read\t4096\n", "GPU 0, write\t8192\n"]);
        let received = given(vec!["\n", ""], |turns| {
            turns.wait("read", 4096).unwrap();
            turns.took(0.25).unwrap();
        });
        assert_eq!(received, ["GPU 0, read\t4096\n", "took\t0.25\n"]);
    }

    #[test]
    fn a_giver_that_goes_or_talks_without_end_is_an_error() {
        given(vec![""], |turns| assert!(turns.wait("read", 4096).is_err()));
        const ENDLESS: &str = "0123456789012345678901234567890123456789012345678901234567890123456789";
        given(vec![ENDLESS], |turns| assert!(turns.wait("read", 4096).is_err()));
        let nobody = setting(&["turns=/nowhere/at/all".into()]);
        let error = Turns::new(&nobody, String::new()).err().unwrap();
        assert!(error.to_string().contains("/nowhere/at/all"), "{error}");
    }
}

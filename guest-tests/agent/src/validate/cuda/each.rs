//! Selection of the GPUs to validate, the reason if there are none, and one finding of all of them.
//!
//! The one rule for machines without usable GPUs is here: no library, no device, and a driver older than what is called
//! are skipped, by name, because they show nothing about the machine; any other answer of the driver is an error.

use egm_guest::findings::{Figure, Outcome};
use egm_vendor::cuda::{CudaError, Device, Driver, Kind};

use super::egm::Pieces;
use super::gpu::{Family, Gpu, NODES};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::library;
use crate::validate::Setting;

/// Number of `CUDA_ERROR_NO_DEVICE` in `cuda.h`.
const NO_DEVICE: u32 = 100;

/// The GPUs that the driver shows to this process (`CUDA_VISIBLE_DEVICES` selects them), or the finding that explains
/// why there are none.
pub(crate) fn devices() -> Result<Result<Vec<Device>, Finding>, Broken> {
    if let Some(finding) = library::unloadable("libcuda.so.1") {
        return Ok(Err(finding));
    }
    match Driver::open().and_then(Driver::devices) {
        Ok(devices) if devices.is_empty() => {
            Ok(Err(Finding::skipped("the driver has no GPU: see nvidia-smi, and CUDA_VISIBLE_DEVICES")))
        }
        Ok(devices) => Ok(Ok(devices)),
        Err(error) => match why_skipped(&error) {
            Some(reason) => Ok(Err(Finding::skipped(reason))),
            None => Err(error.into()),
        },
    }
}

/// The reason for a skip, if `error` means that there is no GPU to validate.
fn why_skipped(error: &CudaError) -> Option<String> {
    match error {
        CudaError::NoLibrary | CudaError::NoFunction(_) => Some(error.to_string()),
        error => (error.code() == Some(NO_DEVICE)).then(|| error.to_string()),
    }
}

/// Does `work` with the first GPU, where one is enough to decide a claim about something else; or explains its absence.
pub(crate) fn on_gpu(work: impl FnOnce(&Gpu) -> Result<Finding, Broken>) -> Result<Finding, Broken> {
    match devices()? {
        Ok(devices) => match devices.first() {
            Some(device) => work(&Gpu::new(*device)?),
            None => Ok(Finding::skipped("the driver has no GPU")),
        },
        Err(finding) => Ok(finding),
    }
}

/// Does `work` with each GPU, one after the other, and makes one finding of all results; or explains their absence.
pub(crate) fn on_each_gpu(mut work: impl FnMut(&Gpu) -> Result<Finding, Broken>) -> Result<Finding, Broken> {
    let devices = match devices()? {
        Ok(devices) => devices,
        Err(finding) => return Ok(finding),
    };
    let mut of = |device: Device| -> Result<Finding, Broken> { work(&Gpu::new(device)?) };
    let found = devices.iter().map(|device| (device.ordinal, of(*device).unwrap_or_else(Finding::from)));
    Ok(joined(&found.collect::<Vec<_>>()))
}

/// Result of a check with memory of one place.
pub(crate) enum Seen {
    /// It was decided, and this was measured.
    Figures(Vec<Figure>),
    /// It could not be decided, for this reason.
    Not(String),
}

impl From<Vec<Figure>> for Seen {
    fn from(figures: Vec<Figure>) -> Self {
        Self::Figures(figures)
    }
}

/// Does `work` with memory of each place of a family, by each GPU, and collects what is untrue; skipped where the platform has
/// no such memory. `at_once`: GPU and processors use it at the same time.
pub(crate) fn on_family<T: Into<Seen>>(
    setting: &Setting,
    family: Family,
    at_once: bool,
    work: impl Fn(&Gpu, Kind, &mut Claim) -> Result<T, Broken>,
) -> Result<Finding, Broken> {
    on_each_gpu(|gpu| {
        let kinds = match gpu.kinds(setting, family)? {
            Ok(kinds) => kinds,
            Err(finding) => return Ok(finding),
        };
        if kinds.is_empty() {
            return Ok(Finding::skipped(format!("{NODES} names no node with memory of processors")));
        }
        let attributes = gpu.context.attributes();
        let denied =
            |kind: &Kind| if at_once { attributes.denied_at_once(*kind) } else { attributes.denied(*kind) };
        if let Some(attribute) = kinds.iter().find_map(denied) {
            return Ok(Finding::skipped(format!("this GPU reports 0 for {attribute}")));
        }
        let (mut claim, mut figures, mut not) = (Claim::default(), Vec::new(), Vec::new());
        let places = kinds.len();
        for kind in kinds {
            gpu.egm.get().into_iter().for_each(Pieces::again);
            match work(gpu, kind, &mut claim)?.into() {
                Seen::Figures(of_kind) => figures.extend(of_kind),
                Seen::Not(reason) => not.push(reason),
            }
        }
        let found = if not.len() == places && claim.is_true() {
            Finding::skipped(not.join("; "))
        } else {
            // What was decided of one place stays decided.
            not.into_iter().for_each(|reason| claim.seen(format!("not checked: {reason}")));
            claim.finish().with_figures(figures)
        };
        Ok(match gpu.egm.get() {
            Some(pieces) => pieces.with_broken(found),
            None => found,
        })
    })
}

/// One finding of several GPUs': failed where one failed, an error where one broke, else passed where one passed. Names of
/// figures begin with the GPU that they are of.
fn joined(found: &[(i32, Finding)]) -> Finding {
    let outcome = [Outcome::Failed, Outcome::Error, Outcome::Passed]
        .into_iter()
        .find(|outcome| found.iter().any(|(_, finding)| finding.outcome == *outcome))
        .unwrap_or(Outcome::Skipped);
    let reason = reason(found, outcome);
    let figures = found.iter().flat_map(|(ordinal, finding)| {
        let of_gpu = move |figure: &Figure| Figure {
            series: of_gpu_called(*ordinal) + &figure.series,
            ..figure.clone()
        };
        finding.figures().iter().map(of_gpu)
    });
    let figures = figures.collect();
    let finding = match outcome {
        Outcome::Failed => Finding::failed(reason),
        Outcome::Error => Finding::error(reason),
        Outcome::Skipped => Finding::skipped(reason),
        Outcome::Passed => {
            let mut claim = Claim::default();
            claim.seen(reason);
            claim.finish()
        }
    };
    finding.with_figures(figures)
}

/// Beginning of the name of this GPU's figures: `GPU 0, `.
pub(crate) fn of_gpu_called(ordinal: i32) -> String {
    format!("GPU {ordinal}, ")
}

/// The reason of each GPU's finding; once, where all are the same.
fn reason(found: &[(i32, Finding)], outcome: Outcome) -> String {
    let all_say = |finding: &Finding| found.iter().all(|(_, other)| other.reason == finding.reason);
    match found {
        [(_, alone)] => alone.reason.clone(),
        [(_, first), ..] if all_say(first) => format!("each of {} GPUs: {}", found.len(), first.reason),
        _ => {
            let of_gpu = |(ordinal, finding): &(i32, Finding)| {
                let other = match finding.outcome {
                    other if other == outcome => String::new(),
                    other => format!(" {other}"),
                };
                format!("GPU {ordinal}{other}: {}", finding.reason)
            };
            // What is wrong comes first: reports show the beginning of a long reason.
            let (wrong, rest): (Vec<_>, Vec<_>) =
                found.iter().partition(|(_, finding)| finding.outcome == outcome);
            wrong.into_iter().chain(rest).map(of_gpu).collect::<Vec<_>>().join("; ")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed(value: f64) -> Finding {
        Finding::passed("right").with_figures(vec![Figure::of("copy", Some(8), "GB/s", &mut [value])])
    }

    #[test]
    fn one_gpu_that_fails_is_not_hidden_by_another_that_passes() {
        let finding = joined(&[(0, passed(1.0)), (1, Finding::failed("a wrong byte"))]);
        assert_eq!(finding.outcome, Outcome::Failed);
        assert_eq!(finding.reason, "GPU 1: a wrong byte; GPU 0 passed: right");
        let finding = joined(&[(0, Finding::skipped("no way")), (1, passed(1.0))]);
        assert_eq!(finding.outcome, Outcome::Passed);
        assert_eq!(finding.reason, "GPU 1: right; GPU 0 skipped: no way");
        let broken = joined(&[(0, passed(1.0)), (1, Finding::error("gone"))]);
        assert_eq!(broken.outcome, Outcome::Error);
    }

    #[test]
    fn figures_are_named_after_their_gpu() {
        let finding = joined(&[(0, passed(1.0)), (1, passed(2.0))]);
        let names: Vec<&str> = finding.figures().iter().map(|figure| figure.series.as_str()).collect();
        assert_eq!(names, ["GPU 0, copy", "GPU 1, copy"]);
        assert_eq!(finding.reason, "each of 2 GPUs: right");
        assert_eq!(joined(&[(0, passed(1.0))]).reason, "right");
    }

    #[test]
    fn what_is_missing_is_skipped_and_what_is_broken_is_not() {
        let call = |code| CudaError::Call { call: "cuInit", code };
        for skipped in [CudaError::NoLibrary, CudaError::NoFunction("cuMemCreate"), call(NO_DEVICE)] {
            assert!(why_skipped(&skipped).is_some(), "{skipped}");
        }
        for code in [1, 2, 3, 101, 802, 803, 999] {
            assert!(why_skipped(&call(code)).is_none(), "{code}");
        }
    }
}

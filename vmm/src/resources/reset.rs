//! Host functions are reset before a guest gets them: it finds nothing of their last user.

use std::collections::BTreeSet;
use std::error::Error;
use std::thread;

use egm_vfio::backend::{Backend, BackendError};

use super::devices::{DeviceError, DeviceFailure, OpenDevice, OpenedDevice};

/// A function to reset, and its device.
struct Function<'a> {
    id: &'a str,
    backend: &'a dyn Backend,
}

/// Resets the host functions of `devices`; prints what a guest may still find of their earlier state.
///
/// # Errors
/// The first that has a reset of its own and fails at it.
pub(super) fn reset(devices: &[OpenedDevice]) -> Result<(), DeviceFailure> {
    let assigned = devices.iter().filter_map(|OpenedDevice { device, opened }| match opened {
        OpenDevice::Assigned(backend) => Some(Function { id: &device.id, backend: backend.as_ref() }),
        _ => None,
    });
    let notes = reset_all(&assigned.collect::<Vec<_>>())?;
    notes.iter().for_each(|note| tracing::info!("{note}"));
    Ok(())
}

/// Resets functions with a reset of their own in parallel, as each takes up to a second; then the others' buses.
fn reset_all(functions: &[Function<'_>]) -> Result<Vec<String>, DeviceFailure> {
    let (own, others): (Vec<&Function<'_>>, Vec<&Function<'_>>) =
        functions.iter().partition(|function| function.backend.can_reset());
    thread::scope(|scope| {
        let mut resets = Vec::new();
        for function in own {
            let reset = super::spawn(scope, move || function.reset());
            resets.push(reset.map_err(|error| function.failure(DeviceError::Thread(error)))?);
        }
        resets.into_iter().try_for_each(super::joined)
    })?;
    let ours: BTreeSet<&str> = functions.iter().map(|function| function.backend.name()).collect();
    let mut reset = BTreeSet::new();
    Ok(others.into_iter().filter_map(|function| by_bus(function, &ours, &mut reset)).collect())
}

impl Function<'_> {
    fn reset(&self) -> Result<(), DeviceFailure> {
        if egm_address::fault!("stale-function-given") {
            return Ok(());
        }
        self.backend.reset().map_err(|error| self.failure(DeviceError::Reset(error)))
    }

    fn failure(&self, source: DeviceError) -> DeviceFailure {
        DeviceFailure { id: self.id.to_owned(), source }
    }
}

/// Resets the bus of a function that has no reset of its own, once for all that are there: no guest runs yet, so none
/// misses its state. Returns a note for the operator, if any.
fn by_bus(
    Function { id, backend }: &Function<'_>,
    ours: &BTreeSet<&str>,
    reset: &mut BTreeSet<String>,
) -> Option<String> {
    let name = backend.name();
    if reset.contains(name) {
        return None;
    }
    match if egm_address::fault!("stale-bus-given") { Ok(Vec::new()) } else { backend.reset_bus() } {
        Ok(functions) => {
            let names: Vec<String> = functions.iter().map(ToString::to_string).collect();
            let others: Vec<&str> =
                names.iter().map(String::as_str).filter(|name| !ours.contains(name)).collect();
            let others = others.join(", ");
            reset.extend(names);
            (!others.is_empty())
                .then(|| format!("device \"{id}\": {name} is reset with its bus, and so was {others}"))
        }
        Err(error) => Some(left_behind(id, name, &error)),
    }
}

/// Note for the operator on a function that nothing resets.
pub(crate) fn left_behind(id: &str, name: &str, error: &BackendError) -> String {
    let why = error.source().map(|why| format!(": {why}")).unwrap_or_default();
    format!(
        "device \"{id}\": {name} cannot be reset: the guest finds what its last user left in it; {error}{why}"
    )
}

#[cfg(test)]
mod tests {
    use egm_vfio::fake::{Call, FakeFunction, Resets};

    use super::*;

    const FIRST: &str = "0000:07:00.0";
    const SECOND: &str = "0000:07:00.1";

    fn on_one_bus(name: &str) -> FakeFunction {
        let bus = [FIRST, SECOND].map(|name| name.parse().unwrap());
        FakeFunction::default().with_resets(name, Resets::Bus(bus.to_vec()))
    }

    #[test]
    fn a_function_with_a_reset_of_its_own_is_reset_alone() {
        let function = FakeFunction::default();
        assert_eq!(reset_all(&[Function { id: "gpu0", backend: &function }]).unwrap(), [""; 0]);
        assert_eq!(function.take_calls(), [Call::Reset]);
    }

    #[test]
    fn two_functions_of_a_bus_that_are_one_machines_are_reset_by_one_reset_of_the_bus() {
        let (first, second) = (on_one_bus(FIRST), on_one_bus(SECOND));
        assert_eq!(
            reset_all(&[Function { id: "a", backend: &first }, Function { id: "b", backend: &second }])
                .unwrap(),
            [""; 0]
        );
        assert_eq!((first.take_calls(), second.take_calls()), (vec![Call::ResetBus], vec![]));
    }

    #[test]
    fn a_function_of_others_that_is_reset_too_is_reported() {
        let notes = reset_all(&[Function { id: "a", backend: &on_one_bus(FIRST) }]).unwrap();
        assert_eq!(notes, [format!("device \"a\": {FIRST} is reset with its bus, and so was {SECOND}")]);
    }

    #[test]
    fn a_function_that_cannot_be_reset_is_reported_with_its_meaning_and_reason() {
        let fixed = FakeFunction::default().with_resets(FIRST, Resets::Nothing);
        let notes = reset_all(&[Function { id: "a", backend: &fixed }]).unwrap();
        assert_eq!(
            notes,
            [format!(
                "device \"a\": {FIRST} cannot be reset: the guest finds what its last user left in it; {FIRST} has no \
                 bus that can be reset"
            )]
        );
        assert_eq!(fixed.take_calls(), []);
    }

    #[test]
    fn a_reset_that_fails_is_an_error_of_its_device() {
        let gone = FakeFunction::default();
        gone.remove();
        let failure = reset_all(&[Function { id: "gpu0", backend: &gone }]).unwrap_err();
        assert!(failure.id == "gpu0" && matches!(failure.source, DeviceError::Reset(_)), "{failure:?}");
    }
}

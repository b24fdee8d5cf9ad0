//! A slab: numbered places, each empty or with one item. Free numbers are used again.

/// Places by number. Finding a free one takes constant time.
#[derive(Debug)]
pub(crate) struct Places<T> {
    places: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Default for Places<T> {
    fn default() -> Self {
        Self { places: Vec::new(), free: Vec::new() }
    }
}

impl<T> Places<T> {
    /// The number that [`Places::fill`] gives next.
    pub(crate) fn next(&self) -> usize {
        self.free.last().copied().unwrap_or(self.places.len())
    }

    /// Puts `thing` into a free place; returns its number.
    pub(crate) fn fill(&mut self, thing: T) -> usize {
        let number = self.next();
        self.free.pop();
        match self.places.get_mut(number) {
            Some(place) => *place = Some(thing),
            None => self.places.push(Some(thing)),
        }
        number
    }

    /// The item in place `number`.
    pub(crate) fn get(&self, number: usize) -> Option<&T> {
        self.places.get(number)?.as_ref()
    }

    /// The same, to change it.
    pub(crate) fn get_mut(&mut self, number: usize) -> Option<&mut T> {
        self.places.get_mut(number)?.as_mut()
    }

    /// Takes the item out of place `number`, which is free then.
    pub(crate) fn empty(&mut self, number: usize) -> Option<T> {
        let thing = self.places.get_mut(number)?.take()?;
        self.free.push(number);
        Some(thing)
    }

    /// All items with their numbers.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut T)> {
        self.places.iter_mut().enumerate().filter_map(|(number, place)| Some((number, place.as_mut()?)))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// As a map from the smallest numbers would have it, but for which of the free ones is next.
        #[test]
        fn a_place_has_one_thing_until_it_is_emptied_and_no_number_is_left_out(
            steps in prop::collection::vec(prop::option::of(0..20usize), 0..100),
        ) {
            let (mut places, mut model, mut most) = (Places::default(), BTreeMap::new(), 0);
            for (thing, step) in steps.into_iter().enumerate() {
                match step {
                    Some(number) => prop_assert_eq!(places.empty(number), model.remove(&number)),
                    None => {
                        let number = places.next();
                        prop_assert_eq!(places.fill(thing), number);
                        prop_assert!(model.insert(number, thing).is_none());
                    }
                }
                most = most.max(model.len());
                prop_assert!(model.keys().all(|number| *number < most));
                let all: BTreeMap<_, _> = places.iter_mut().map(|(number, thing)| (number, *thing)).collect();
                prop_assert_eq!(&all, &model);
                prop_assert!((0..20).all(|number| places.get(number) == model.get(&number)));
            }
        }
    }
}
